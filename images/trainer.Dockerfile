# The trainer: Megatron-core under torchrun.
FROM pytorch/pytorch:2.15.0-cuda13.2-cudnn9-runtime
WORKDIR /opt/motley
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY weights weights
COPY operator operator
COPY sampler sampler
COPY trainer trainer
COPY local local
COPY examples examples
RUN pip install --no-cache-dir '.[trainer]'
CMD ["motley", "trainer"]
