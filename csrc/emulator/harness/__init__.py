"""What the emulator's interface is made of: building libraries, reading their signatures, naming lines of diagnoses."""
