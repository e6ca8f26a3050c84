"""`mtpserve bench spec`: an engine with drafts of several shapes, compared."""
