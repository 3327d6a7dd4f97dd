"""The HTTP server: OpenAI's and Anthropic's interfaces over one engine process."""
