"""Model catalogue, pull, verify, licences."""
