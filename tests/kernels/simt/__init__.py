"""CUDA sources of `csrc/ops`, compiled with g++ and run on a CPU, thread by thread, by an emulator of our own."""
