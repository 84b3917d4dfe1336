"""Images, videos and sounds in prompts: encoders, their outputs on the device, and the tokens that those replace."""
