"""Other programs' doors into KernelBraid, a module each."""
