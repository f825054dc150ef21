"""Configurations of other trainers as ndbench overrides; every key of the file is accounted for, none is dropped.

Knows the key names of Accelerate and Axolotl and the schema of ``ndbench.config``. Imports no torch, runs nothing.
"""
