"""What `scripts/device_check` runs inside the private environment."""
