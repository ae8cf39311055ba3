"""Messages, chat templates, and the text side of an answer."""
