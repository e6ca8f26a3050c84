"""What operators see: metrics, the page, the log line."""
