"""`mtpserve replay`: recorded steps, computed again."""
