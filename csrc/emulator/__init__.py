"""An emulator of CUDA: compiles the sources of `csrc/ops` with g++ and runs them on a CPU, thread by thread."""
