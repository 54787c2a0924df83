"""`grmoe serve`: an OpenAI-compatible server with the dial in the request, and the plugin for vLLM."""
