# An image for training: on the CPU by default, on GPUs with --build-arg DEVICE=cu126. See docs/containers.md.
#
#   docker build --tag trident .
#   docker run --rm trident                                                shows what works in it (tools/doctor.py)
#   docker run --rm --shm-size 1g -v "$PWD/data:/data" trident python pretrain_gpt.py ...
#
#   docker build --build-arg DEVICE=cu126 --tag trident:cu126 .
#   docker run --rm --gpus all --shm-size 8g trident:cu126
ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

# cpu, or a build of torch for GPUs, such as cu126: a folder of https://download.pytorch.org/whl
ARG DEVICE=cpu
# extras of pyproject.toml, separated by commas
ARG EXTRAS=plot

WORKDIR /opt/trident-megatron
COPY containers/install.sh containers/
RUN bash containers/install.sh torch "$DEVICE"
COPY . .
RUN bash containers/install.sh project "$EXTRAS"

ENV OMP_NUM_THREADS=1
CMD ["python", "tools/doctor.py"]
