subprocess.Popen(["bash","/tmp/cb/serve.sh"]); wait(14,150)
