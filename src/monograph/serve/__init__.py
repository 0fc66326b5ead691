"""An endpoint that speaks OpenAI's protocol over the decode graph."""
