# lowtide with its command as the entry point. With CUDA (PyPI's torch brings its libraries), and for a CPU:
#   docker build -t lowtide .
#   docker build -t lowtide:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu --build-arg EXTRAS=gguf .
#   docker run --gpus all -v "$PWD:/data" lowtide sft --model M --dataset rows.jsonl --output_dir run
FROM python:3.11-slim
ARG TORCH_INDEX=""
ARG EXTRAS="bnb,ao,gguf"
# Triton compiles kernels as they are first used
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /lowtide
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"
RUN useradd --create-home trainer && mkdir /data && chown trainer /data
USER trainer
WORKDIR /data
ENTRYPOINT ["lowtide"]
CMD ["--help"]
