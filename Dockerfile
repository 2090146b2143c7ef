# tvmflow in a container: `docker build -t tvmflow .`, then in a project
# `docker run --rm -v "$PWD:/project" tvmflow run recipes/net.yaml`.
# Nothing but Python is installed: no compiler, no CUDA. For MXNet: --build-arg EXTRAS=[mxnet,remote]
ARG PYTHON=3.12
FROM docker.io/library/python:${PYTHON}-slim
ARG EXTRAS=[remote,images]
WORKDIR /opt/tvmflow
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tvmflow ./tvmflow
COPY pipelines ./pipelines
COPY docs/man_pages.py ./docs/
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".${EXTRAS}" && rm -rf build
# Files in a project that is mounted belong to whoever runs the container: add --user "$(id -u):$(id -g)".
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1
WORKDIR /project
ENTRYPOINT ["tvmflow"]
CMD ["help"]
