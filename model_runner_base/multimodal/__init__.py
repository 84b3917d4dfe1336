"""Images and such in prompts: encoders, what they made of each item on the device, and where tokens stand for it."""
