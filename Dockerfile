# The command line in a small image: `make dist image`, then
#   docker run --rm --volume "$PWD:/data" --user "$(id -u):$(id -g)" emdcfl run --scenario rotated-digits --out runs/first
FROM python:3.11-slim AS build
# where CPU builds of torch are: --build-arg PIP_EXTRA_INDEX_URL=…; without it the image has the CUDA build and is many times larger
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt dist/*.whl /tmp/
RUN python -m venv /opt/emdcfl \
 && wheel="$(echo /tmp/*.whl)" \
 && /opt/emdcfl/bin/pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[tables,plots]" \
 && find /opt/emdcfl -name '__pycache__' -type d -prune -exec rm -rf {} + \
 && rm -rf /opt/emdcfl/lib/python*/site-packages/torch/include /opt/emdcfl/lib/python*/site-packages/torch/test

FROM python:3.11-slim
COPY --from=build /opt/emdcfl /opt/emdcfl
RUN useradd --create-home --uid 1000 emdcfl && mkdir /data && chown emdcfl /data
USER emdcfl
WORKDIR /data
ENV PATH=/opt/emdcfl/bin:$PATH PYTHONDONTWRITEBYTECODE=1 EMDCFL_CACHE=/tmp/emdcfl
ENTRYPOINT ["emdcfl"]
CMD ["--help"]
