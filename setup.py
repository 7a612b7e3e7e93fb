"""Puts the configuration groups inside the package of a wheel; all else about packaging is in pyproject.toml."""

from setuptools import find_packages, setup

CONFIGS = "adabatch.hydra_configs"

setup(
    packages=[*find_packages(include=["adabatch*"]), CONFIGS],
    package_dir={CONFIGS: "hydra_configs"},
    package_data={"adabatch": ["py.typed"], CONFIGS: ["*.yaml", "*/*.yaml"]},
)
