"""The Textual chat, a front end on the Runtime protocol."""
