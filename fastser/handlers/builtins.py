"""bytes, bytearray, array.array and memoryview."""
