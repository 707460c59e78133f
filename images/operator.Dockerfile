# The operator: no torch. Built from the repository's root: docker build -f images/operator.Dockerfile -t motley-operator:0.1.0 .
FROM python:3.12-slim
WORKDIR /opt/motley
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY weights weights
COPY operator operator
COPY sampler sampler
COPY trainer trainer
COPY local local
RUN pip install --no-cache-dir '.[operator]' && python -c "import sys, motley_operator; assert 'torch' not in sys.modules"
USER 65532:65532
CMD ["motley", "operator"]
