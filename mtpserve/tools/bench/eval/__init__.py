"""`mtpserve bench eval`: an exam that a server or an engine answers twice, compared answer by answer."""
