"""The OpenAPI document, as strict as what is checked, and the page that shows it."""
