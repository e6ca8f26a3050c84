"""`mtpserve inspect`: what a checkpoint is and what it takes, from its headers."""
