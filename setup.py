"""Installs megatron_rl_loss. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

DEMO = [
    "transformers>=4.51",
    "gguf>=0.10",
    "accelerate",
    "reasoning-gym>=0.1.19",
    "matplotlib",
    "rich",
]
LOGGING = ["tensorboard", "wandb"]
PARQUET = ["pyarrow"]
JSON = ["pysimdjson>=6"]  # JSON lines several times faster
PRETRAIN = ["six", "pydantic", "psutil", "regex", "tqdm", "typing_extensions"]  # megatron.training
TEST = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "peft>=0.21", *PRETRAIN]

setup(
    name="megatron-rl-loss",
    version="0.1.0",
    description="Megatron-Core plugin for reinforcement learning: the same gradient for any cut",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_rl_loss", "megatron_rl_loss.*"]),
    install_requires=["torch>=2.4", "megatron-core>=0.13", "omegaconf>=2.3", "packaging"],
    extras_require={
        "demo": DEMO,
        "json": JSON,
        "logging": LOGGING,
        "parquet": PARQUET,
        "pretrain": PRETRAIN,
        "te": ["transformer-engine[pytorch]"],
        "test": TEST + DEMO + LOGGING + PARQUET + JSON,
    },
    entry_points={"console_scripts": ["megatron-rl-loss=megatron_rl_loss.cli:main"]},
)
