"""What a device needs to test its runner: tiny models and their references."""
