"""Peak memory: writing takes the output and a constant, reading takes the buffers and the result."""

import subprocess
import sys

import pytest

CONSTANT = 32 << 20  # bytes: the kept scratch buffer, and what the allocator keeps

SCRIPT = """
import pickle, resource, sys
from fastser.pickle import dumps

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

x = {make}
dumps(x[:10])
before = peak()
buffers = []
data = dumps(x, buffer_callback=buffers.append)
written = len(data) + sum(buffer.raw().nbytes for buffer in buffers)
print(peak() - before, written)
"""

MAKE = {
    "texts": "[f'text number {i} of many' for i in range(3_000_000)]",
    "records": "[{'a': i / 3, 'b': i, 'c': None} for i in range(2_000_000)]",
    "nested lists": "[[i, i / 3] for i in range(3_000_000)]",
    "floats": "[i / 3 for i in range(10_000_000)]",
    "one text": "['x' * 100_000_000, 1]",
}


@pytest.mark.parametrize("name", MAKE)
def test_peak_of_writing(name):
    run = [sys.executable, "-c", SCRIPT.replace("{make}", MAKE[name])]
    grown, written = map(int, subprocess.run(run, check=True, capture_output=True).stdout.split())
    assert written > CONSTANT
    assert grown < written + CONSTANT


def test_peak_of_a_large_array():
    script = SCRIPT.replace("{make}", "[__import__('numpy').ones(30_000_000), 1]")
    run = [sys.executable, "-c", script]
    grown, written = map(int, subprocess.run(run, check=True, capture_output=True).stdout.split())
    assert written > 240_000_000
    assert grown < CONSTANT  # the buffer is the memory of the array
