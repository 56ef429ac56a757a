"""How a rank carries operations out. The front ends (horovod, gradients, process_group) say what they want."""
