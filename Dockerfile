# syntax=docker/dockerfile:1
# `make image` demands a digest of the base: BASE=python:3.11-slim-bookworm@sha256:…
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock requirements-build.lock ./
# Without build isolation, in which pip would fetch the newest setuptools for a package that has no wheel (nkeys).
RUN python -m venv /opt/build \
    && /opt/build/bin/python -m pip install --require-hashes -r requirements-build.lock \
    && /opt/build/bin/python -m pip wheel --require-hashes --no-build-isolation --wheel-dir /opt/locked -r requirements.lock \
    && python -m venv --without-pip /opt/openapi-tool \
    && /opt/build/bin/python -m pip --python /opt/openapi-tool/bin/python install --no-deps --no-index /opt/locked/*.whl
COPY pyproject.toml LICENSE ./
# .dockerignore leaves out the embedded stack and its recordings.
COPY openapi_tool ./openapi_tool
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && /opt/build/bin/python -m pip --python /opt/openapi-tool/bin/python install --no-deps --no-index /opt/wheels/*.whl

FROM ${BASE}
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="openapi-tool" \
      org.opencontainers.image.description="Answers Jina search and reader tool calls of MCP and HTTP clients, and of CommonGround agent kernels" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# PID 1: the kernel drops a signal to it that it does not handle yet, and an interpreter takes a while until it can handle
# one. Debian's revision of the package is not pinned, because it differs by architecture.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
# Nothing can install packages in a running container.
RUN python -m pip uninstall --yes --root-user-action=ignore wheel setuptools pip \
    && rm -rf /usr/local/lib/python3.*/ensurepip
# A named volume gets owner and mode of the folder that it covers. Below it the gateway makes a folder of its own.
RUN install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/openapi-tool
COPY --from=build /opt/openapi-tool /opt/openapi-tool
ENV PATH=/opt/openapi-tool/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_STATE_HOME=/var/lib/openapi-tool SQLITE_TMPDIR=/var/lib/openapi-tool \
    OPENAPI_TOOL__HEALTH__HOST=0.0.0.0 OPENAPI_TOOL__HEALTH__PORT=8080
# No HEALTHCHECK: Kubernetes ignores it, images in the OCI format do not have one, and each run would start an interpreter.
# docs/releasing.md has the command for an engine that needs one.
EXPOSE 8080 8090
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "openapi-tool"]
CMD ["serve"]
