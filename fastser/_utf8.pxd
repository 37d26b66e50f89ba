"""One character as UTF-8, for the rooms that write strs."""

from libc.stdint cimport uint32_t


cdef inline int put_char(unsigned char* at, uint32_t c) noexcept:
    """Write a character, return its number of bytes: three for a lone surrogate, like ``surrogatepass``."""
    if c < 0x80:
        at[0] = <unsigned char>c
        return 1
    if c < 0x800:
        at[0] = <unsigned char>(0xc0 | c >> 6)
        at[1] = <unsigned char>(0x80 | c & 0x3f)
        return 2
    if c < 0x10000:
        at[0] = <unsigned char>(0xe0 | c >> 12)
        at[1] = <unsigned char>(0x80 | c >> 6 & 0x3f)
        at[2] = <unsigned char>(0x80 | c & 0x3f)
        return 3
    at[0] = <unsigned char>(0xf0 | c >> 18)
    at[1] = <unsigned char>(0x80 | c >> 12 & 0x3f)
    at[2] = <unsigned char>(0x80 | c >> 6 & 0x3f)
    at[3] = <unsigned char>(0x80 | c & 0x3f)
    return 4
