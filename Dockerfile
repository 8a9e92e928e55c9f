# syntax=docker/dockerfile:1
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock requirements-build.lock ./
RUN python -m venv /opt/build \
    && /opt/build/bin/python -m pip install --require-hashes -r requirements-build.lock \
    && python -m venv /opt/openapi-tool \
    && /opt/openapi-tool/bin/python -m pip install --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY openapi_tool ./openapi_tool
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/openapi-tool/bin/python -m pip install --no-deps --no-index /wheels/*.whl

FROM python:3.11-slim-bookworm
COPY --from=build /opt/openapi-tool /opt/openapi-tool
ENV PATH=/opt/openapi-tool/bin:$PATH PYTHONUNBUFFERED=1 \
    OPENAPI_TOOL__HEALTH__HOST=0.0.0.0 OPENAPI_TOOL__HEALTH__PORT=8080
EXPOSE 8080
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["openapi-tool"]
CMD ["serve"]
