"""Speculation: drafts of a request's next tokens, which one step then verifies together."""
