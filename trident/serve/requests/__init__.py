"""What a client may ask for: limits, reading bounded JSON into typed values, and how a refusal is worded."""
