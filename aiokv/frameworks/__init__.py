"""What a tensor framework needs beside DLPack; only these import one."""
