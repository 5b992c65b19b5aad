"""Package description. Exact versions of everything installed are in launch/requirements.txt."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent

DEPENDENCIES = [
    # Tensors, process groups, fully_shard, distributed checkpoints. Exact, because what fully_shard
    # does under a hand-written pipeline is not a documented interface: the equivalence tests hold
    # for this version, and a new one has to pass them first.
    "torch==2.13.0",
    # Memory-mapped token files, sample orders. 2: promotion rules without value-dependent dtypes.
    "numpy>=2.0,<3",
    # Trains and applies tokenizers.
    "sentencepiece>=0.2,<0.3",
    # Optional curves of a run; a failure of it never stops one.
    "wandb>=0.25,<1",
    # Strict, frozen recipes with errors that name the key.
    "pydantic>=2.10,<3",
    # Progress bars and tables on the console.
    "rich>=13.7,<16",
    # Weights on disk without pickle.
    "safetensors>=0.6,<1",
    # .zst corpora.
    "zstandard>=0.23,<1",
    # Letters and pixels of `megagrid schedule --png`; imported for that alone. 10.1: a font of its
    # own in any size.
    "pillow>=10.1,<14",
]

FLOAT8_DEPENDENCIES = [
    # Casts and scaled products of `train.float8`. Exact, because the functions that multiply
    # tensors, without its own modules around them, are not a documented interface.
    "torchao==0.18.0",
]

TEST_DEPENDENCIES = [
    # 8.1: imports test files by their place in the tree, so rank processes can import them too.
    "pytest>=8.1,<10",
    # Properties over random schedules, shapes and shards.
    "hypothesis>=6.100,<7",
    # Format and lint. Exact, since each version formats a little differently.
    "ruff==0.17.6",
    # Independent implementations of the model families, to compare logits with. Not used at run
    # time.
    "transformers>=5,<6",
]

setup(
    name="megagrid",
    version=re.search(
        r'^__version__ = "(.+)"', (ROOT / "megagrid/__init__.py").read_text(), re.MULTILINE
    ).group(1),
    description="Pretrains GPT and Llama models on grids of tensor, pipeline and data parallelism.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_namespace_packages(include=["megagrid", "megagrid.*"]),
    # A link to launch/slurm.sbatch, which `megagrid submit` fills in.
    package_data={"megagrid.jobs": ["slurm.sbatch"]},
    python_requires=">=3.11",
    install_requires=DEPENDENCIES,
    extras_require={"test": TEST_DEPENDENCIES, "float8": FLOAT8_DEPENDENCIES},
    entry_points={"console_scripts": ["megagrid=megagrid.cli:main"]},
)
