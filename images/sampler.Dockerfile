# The sampler's agent on SGLang's own image: its torch, kernels and server stay as published; ours is added beside them.
ARG SGLANG=v0.5.23
FROM lmsysorg/sglang:${SGLANG}
WORKDIR /opt/motley
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY weights weights
COPY operator operator
COPY sampler sampler
COPY trainer trainer
COPY local local
COPY examples examples
RUN pip install --no-cache-dir --no-deps . && pip install --no-cache-dir msgspec pydantic typer aiohttp fsspec prometheus-client safetensors zstandard
CMD ["motley", "sampler"]
