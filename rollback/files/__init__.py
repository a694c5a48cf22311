"""State files read and edited without torch and without executing them: torch zip, pickle, DCP, safetensors, JSON."""
