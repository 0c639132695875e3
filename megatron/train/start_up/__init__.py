"""What comes before the first step: connected ranks, the engine, the report, and a summary of the run."""
