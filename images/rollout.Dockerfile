# Rollout workers and the router: CPU nodes, no torch. bubblewrap isolates the policy's commands.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends bash bubblewrap git util-linux && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/motley
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY weights weights
COPY operator operator
COPY sampler sampler
COPY trainer trainer
COPY local local
COPY examples examples
RUN pip install --no-cache-dir '.[rollout]'
CMD ["motley", "rollout"]
