"""State files read and edited without torch: torch zip, pickle, DCP, safetensors, JSON. Nothing in them is executed."""
