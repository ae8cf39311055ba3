"""What scripts/chat, scripts/test and scripts/device_check share. Standard library only; needs Python 3.11."""
