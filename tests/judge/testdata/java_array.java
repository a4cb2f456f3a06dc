public class Main {
  public static void main(String[] args) {
    int[] a = new int[3];
    a[args.length + 3] = 1;
  }
}
