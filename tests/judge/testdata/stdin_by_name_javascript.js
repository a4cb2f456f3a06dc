process.stdout.write(require('fs').readFileSync('/dev/stdin', 'utf8'));
