"""Kernels written for one thread in inline PTX: values with operators, one emitter for each instruction, the launch.

A kernel is a function `emit(machine, ...)`. `instructions.PtxMachine` emits PTX; the tests' numpy machine computes the
same instructions for all threads of a CTA.
"""
