# tvmflow in a container: `docker build -t tvmflow .`, then in a project
# `docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/project" tvmflow run recipes/net.yaml`.
# The image holds Python and one virtual environment: no compiler, no CUDA, no sources, no pip of its own.
# For MXNet: --build-arg EXTRAS=[mxnet,remote]
ARG PYTHON=3.12
FROM docker.io/library/python:${PYTHON}-slim AS build
ARG EXTRAS=[remote,images]
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tvmflow ./tvmflow
COPY pipelines ./pipelines
COPY templates ./templates
RUN python -m venv --without-pip /opt/tvmflow
RUN python -m pip --python /opt/tvmflow/bin/python install --no-cache-dir --disable-pip-version-check -c constraints.txt ".${EXTRAS}"

FROM docker.io/library/python:${PYTHON}-slim
COPY --from=build /opt/tvmflow /opt/tvmflow
# Files in a project that is mounted belong to whoever runs the container.
ENV PATH=/opt/tvmflow/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
WORKDIR /project
ENTRYPOINT ["tvmflow"]
CMD ["help"]
