import subprocess
print(subprocess.run(["bash", "-c", "echo $((6 * 7))"], capture_output=True, text=True).stdout, end="")
