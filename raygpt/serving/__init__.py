"""A run behind OpenAI's completions, with continuous batching, on Ray Serve; and a page to write in."""
