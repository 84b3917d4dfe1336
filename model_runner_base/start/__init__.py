"""What happens before the first request."""
