# An image for training, on the CPU by default. The project's own tests do not build it (they need no container engine).
#
#   docker build --tag trident-megatron .
#   docker run --rm trident-megatron                                 shows what works in it (tools/doctor.py)
#   docker run --rm --shm-size 1g -v "$PWD/data:/data" trident-megatron python pretrain_gpt.py ...
#
# For GPUs take the CUDA build of torch, which brings CUDA's libraries with it; the host needs a driver and the container toolkit:
#
#   docker build --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu126 --tag trident-megatron:gpu .
#   docker run --rm --gpus all --shm-size 8g trident-megatron:gpu
FROM python:3.12-slim

ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX_URL" torch==2.13.0

WORKDIR /opt/trident-megatron
COPY . .
# The index builder needs a C++ compiler only while it is compiled.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && pip install --no-cache-dir --editable ".[plot]" \
    && apt-get purge --yes --auto-remove g++ \
    && rm -rf /var/lib/apt/lists/*

ENV OMP_NUM_THREADS=1
CMD ["python", "tools/doctor.py"]
