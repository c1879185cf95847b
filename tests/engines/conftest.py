"""An environment for each engine, made once in a session."""

from __future__ import annotations

import pytest

from tests.engines.environments import Environment, Packages

LMCACHE = Packages(
    "lmcache",
    "0.5.6",
    tuple(
        "msgspec pyzmq aiofile redis fastapi uvicorn httpx prometheus_client psutil sortedcontainers xxhash blake3 "
        "nvtx cachetools cufile-python transformers safetensors aiohttp setproctitle opentelemetry-api rich aiofiles "
        "opentelemetry-sdk opentelemetry-exporter-prometheus opentelemetry-exporter-otlp requests pyyaml tqdm "
        "py-cpuinfo cryptography grpcio openai httptools lark pytest-timeout setuptools_scm ninja packaging".split()
    ),
)
SGLANG = Packages(
    "sglang",
    "0.5.23",
    tuple(
        "msgspec pydantic==2.13.4 pyzmq orjson pybase64 psutil requests transformers numpy packaging aiohttp fastapi "
        "uvicorn httpx tqdm pillow setproctitle prometheus_client sentencepiece".split()
    ),
)
VLLM = Packages(
    "vllm",
    "0.33.0",
    tuple(
        "cbor2 msgspec pydantic==2.13.4 pyzmq psutil requests transformers regex cloudpickle cachetools py-cpuinfo "
        "aiohttp prometheus_client pyyaml tqdm blake3 pybase64 filelock protobuf tokenizers jinja2 openai".split()
    ),
)


def _environment(packages: Packages) -> Environment:
    return Environment(packages)


@pytest.fixture(scope="session")
def lmcache() -> Environment:
    return _environment(LMCACHE)


@pytest.fixture(scope="session")
def sglang() -> Environment:
    return _environment(SGLANG)


@pytest.fixture(scope="session")
def vllm() -> Environment:
    return _environment(VLLM)
