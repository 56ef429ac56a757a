"""The inside of a machine, and how its GPUs' gradients are best summed before they travel.

    nccl_xml, sysfs, nvlink ─► machine_reader ─► MachineTopology ─► choice ─► LocalPlan: steps, transfers, links

machine_topology  processors, PCIe switches, GPUs, NICs, NVLink, and the rate of each link
local_plan        the ways to sum, as steps from which the time follows
choice            which way is best, and why
bandwidth_probe   what to measure where a virtual machine hides the PCIe tree, and the tree that the rates imply
nccl_xml          NCCL's topology files, read and written
sysfs             what Linux shows below /sys
nvlink            what the driver tells, or a GPU's model implies
machine_reader    all of these together
"""
